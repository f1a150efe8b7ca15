"""Small runs on emulated devices, forked from a process that has imported torch, with changed or observed source."""
