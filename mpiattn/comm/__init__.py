"""Everything that calls MPI: meshes, messages, collective calls, and what happens when a rank fails."""
