"""Repositories of a Hugging Face Hub, read only: ``hf://org/name[@revision][/path]``."""
