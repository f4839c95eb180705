"""The DCP mount: TierStorageWriter and TierStorageReader for ``torch.distributed.checkpoint``."""
