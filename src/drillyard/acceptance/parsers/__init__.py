"""What other programs print, parsed: nvidia-smi, dcgmi, nccl-tests, the kernel log."""
