"""Measuring kernels: honest timing, races against rivals, and the ``hyscale profile`` command."""
