"""partopt plans pipeline-parallel training from measurements."""

__version__ = "0.1.0"
