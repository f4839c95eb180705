"""From memory to the SSD. ``dcp/save_session.py`` has the order of a save."""
