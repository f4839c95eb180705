"""As much of vLLM as a loader plugin meets: its registry, its base class, and how its processes find plugins."""
