"""The host and its installation: devices, versions, launchers, and files that appear whole or not at all."""
