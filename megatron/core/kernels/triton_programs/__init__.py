"""Programs in Triton's language and the autograd functions that launch them; imported only where Triton is used."""
