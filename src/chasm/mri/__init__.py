"""MRI physics: centred Fourier transform, sampling masks, coil operators. Knows nothing of models."""

from chasm.mri.fft import fft2c as fft2c
from chasm.mri.fft import ifft2c as ifft2c
from chasm.mri.fft import to_channels as to_channels
from chasm.mri.fft import to_complex as to_complex
