"""Orthogonalisation of a matrix by Newton-Schulz iterations, and the scale of what comes out.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Bernstein and Newhouse 2024,
https://arxiv.org/abs/2409.20325.
"""

from __future__ import annotations

import math

import torch

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients a, b, c of ``a x + b x³ + c x⁵``, one triple for each step and then again from the first."""
_EPSILON = 1e-7


def orthogonalize(matrix: torch.Tensor, num_steps: int, coefficients: str, dtype: torch.dtype) -> torch.Tensor:
    """Return about the nearest matrix whose rows, or columns where these are fewer, are orthonormal.

    Singular values end between about 0.7 and 1.2; a matrix of zeros stays one. Products are computed in ``dtype``.

    Shapes: ``[rows, columns] -> [rows, columns]`` in the matrix's own dtype.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if is_tall else matrix) / matrix.norm().clamp(min=_EPSILON)
    x = x.to(dtype)
    triples = COEFFICIENTS[coefficients]
    for step in range(num_steps):
        a, b, c = triples[step % len(triples)]
        gram = x @ x.t()
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    result: torch.Tensor = (x.t() if is_tall else x).to(matrix.dtype)
    return result


def update_scale(rows: int, columns: int, mode: str) -> float:
    """Return the factor of an orthogonal update of a matrix that maps ``columns`` features to ``rows``.

    ``spectral`` gives each element about the size of 1 (0.2 of it is that of AdamW: Liu et al. 2025,
    https://arxiv.org/abs/2502.16982), ``unit_rms_norm`` and ``shape_scaling`` keep outputs as large at any width.
    """
    ratio = {
        "spectral": max(rows, columns),
        "unit_rms_norm": rows / columns,
        "shape_scaling": max(1.0, rows / columns),
    }[mode]
    return math.sqrt(ratio)
