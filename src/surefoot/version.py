"""The version of Surefoot: known without its installation, and without importing anything."""

__version__ = "0.1.0"
