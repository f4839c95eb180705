"""From the SSD to shared storage, in the background, within a rate limit."""
