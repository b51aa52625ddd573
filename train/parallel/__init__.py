"""Distributed training: processes, DDP, FSDP2, ZeRO."""
