"""Record the lines that this process executes, if MUTATION_RECORD names a folder; Python imports this at its start."""

from __future__ import annotations

import os

if os.environ.get("MUTATION_RECORD"):
    import atexit
    import json
    import uuid
    from pathlib import Path
    from typing import Any, NoReturn

    import coverage

    _REPOSITORY = Path(__file__).resolve().parents[3]
    _FOLDER = Path(os.environ["MUTATION_RECORD"])

    class LineRecorder:
        """Coverage of one process, each line with the tests that executed it."""

        def __init__(self) -> None:
            self.coverage: coverage.Coverage | None = None
            self.test = ""

        def start(self) -> None:
            """Record from now on under the test that runs now."""
            if self.coverage is not None:
                self.coverage.stop()
            self.coverage = coverage.Coverage(
                data_file=None, include=[f"{_REPOSITORY}/megatron/*"], config_file=False, messages=False
            )
            self.coverage.config.disable_warnings = ["no-data-collected", "module-not-measured", "couldnt-parse"]
            self.coverage.start()
            self.switch_test(_running_test())

        def switch_test(self, test: str) -> None:
            """Record under another test."""
            assert self.coverage is not None
            if test != self.test:
                self.coverage.switch_context(test)
            self.test = test

        def save(self) -> None:
            """Write the lines of each test as one JSON object, and record no more."""
            recorded, self.coverage = self.coverage, None
            if recorded is None:
                return
            recorded.stop()
            data = recorded.get_data()
            lines: dict[str, dict[str, list[int]]] = {}
            for path in data.measured_files():
                name = str(Path(path).relative_to(_REPOSITORY))
                for line, tests in data.contexts_by_lineno(path).items():
                    for test in tests:
                        lines.setdefault(test, {}).setdefault(name, []).append(line)
            if lines:
                (_FOLDER / f"{uuid.uuid4().hex}.json").write_text(json.dumps(lines))

    def _running_test() -> str:
        try:
            return Path(os.environ["MUTATION_TEST_FILE"]).read_text()
        except (KeyError, OSError):
            return ""

    recorder = LineRecorder()
    recorder.start()

    def _start_anew() -> None:
        recorder.test = "another process's"
        recorder.start()

    _real_exit = os._exit

    def _save_and_exit(status: int) -> NoReturn:
        recorder.save()
        _real_exit(status)

    exits: Any = _save_and_exit
    os._exit = exits
    os.register_at_fork(after_in_child=_start_anew)
    atexit.register(recorder.save)
