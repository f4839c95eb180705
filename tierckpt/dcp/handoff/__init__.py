"""Staged saves that outlive their trainers: described to the agent, finished by a separate process."""
