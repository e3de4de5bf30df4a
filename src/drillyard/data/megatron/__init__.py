"""Megatron-LM's tokenised data: `PREFIX.bin` holds the tokens, `PREFIX.idx` where each document
begins."""
