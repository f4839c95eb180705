"""Replicas of fresh checkpoints on other nodes."""
