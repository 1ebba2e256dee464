"""Schedules: tiles of the mesh, steps of a pass, transfers, bytes, and which of them a mask makes needless."""
