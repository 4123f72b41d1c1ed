"""lmpress: offline compression of trained language models, with the price on the table."""

__version__ = "0.1.0"
