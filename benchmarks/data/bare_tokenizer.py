"""Time the bare tokenizer on texts that are in memory; prints one JSON object. ``TEXT VOCAB MERGES THREADS``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from preprocess_text import read_texts

from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer


def main() -> None:
    """Encode all texts once with the package's own threads and report the seconds."""
    source, vocab_file, merge_file, threads = sys.argv[1:]
    os.environ["RAYON_NUM_THREADS"] = threads
    import awkward  # noqa: F401 - what the package returns arrays with; not to be timed
    from gigatoken.gigatoken_rs import load_hf_json

    texts = read_texts(Path(source))
    model = load_hf_json(GPT2BPETokenizer(vocab_file, merge_file).tokenizer_json())
    model.encode_batch([b"start the threads"] * 8, parallel=int(threads) > 1)
    start = time.perf_counter()
    ids = model.encode_batch(texts, parallel=int(threads) > 1)
    elapsed_s = time.perf_counter() - start
    num_tokens = len(ids.layout.content)
    print(json.dumps({"elapsed_s": elapsed_s, "text_bytes": sum(map(len, texts)), "num_tokens": num_tokens}))


if __name__ == "__main__":
    main()
