"""What the verbs print with, and the command they are joined into."""
