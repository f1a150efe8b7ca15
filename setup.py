"""Declare the compiled extensions; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import pybind11
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "megatron.core.datasets._helpers",
            sources=["megatron/core/datasets/helpers.cpp"],
            depends=[f"megatron/core/datasets/{name}.h" for name in ("blend", "blend_x86", "sample_index", "shuffle")],
            include_dirs=[pybind11.get_include()],
            language="c++",
            # A fused multiply-add would break ties between the data sets of a blend.
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden"],
            # Without a working compiler the install goes on, and the NumPy index builder is used.
            optional=True,
        ),
        Extension(
            "megatron.core.datasets._bus_error",
            sources=["megatron/core/datasets/bus_error.cpp"],
            include_dirs=[pybind11.get_include()],
            language="c++",
            extra_compile_args=["-O2", "-g0", "-std=c++17", "-fvisibility=hidden"],
            # A data file that is cut while it is read then ends the run without a word.
            optional=True,
        ),
        Extension(
            "megatron.data._json_lines",
            sources=["megatron/data/json_lines.cpp"],
            include_dirs=[pybind11.get_include()],
            language="c++",
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-fvisibility=hidden"],
            # Python's json module reads the same, more slowly.
            optional=True,
        ),
    ]
)
