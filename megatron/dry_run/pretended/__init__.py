"""What a GPU has and this machine has not: its device, its kernels, its links and its choice among kernels."""
