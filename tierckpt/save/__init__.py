"""From memory to the SSD: flush, write-ahead, direct put."""
