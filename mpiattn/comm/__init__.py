"""Everything that calls MPI: meshes, messages, collective calls, and the handling of failed ranks."""
