"""From memory to the SSD."""
