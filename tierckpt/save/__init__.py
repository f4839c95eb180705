"""From memory to the SSD: room for a save, flush, writing ahead, and the direct put where the SSD is full."""
