"""The host and what is installed on it: devices, versions, launchers, files that appear whole or not at all."""
