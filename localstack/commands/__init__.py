"""The commands of ``sandfleet``, one module each."""
