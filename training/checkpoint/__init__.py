"""Checkpoints: step folders that are whole or absent, read alone by export."""
