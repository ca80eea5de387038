"""MRI physics: centred Fourier transform, sampling masks, coil operators. Knows nothing of models."""

from chasm.mri.classical import sense as sense
from chasm.mri.classical import total_variation as total_variation
from chasm.mri.coils import compression_matrix as compression_matrix
from chasm.mri.coils import estimate_maps as estimate_maps
from chasm.mri.coils import rss as rss
from chasm.mri.espirit import espirit_maps as espirit_maps
from chasm.mri.fft import fft2c as fft2c
from chasm.mri.fft import ifft2c as ifft2c
from chasm.mri.fft import to_channels as to_channels
from chasm.mri.fft import to_complex as to_complex
from chasm.mri.masks import Mask as Mask
from chasm.mri.masks import Sampling as Sampling
from chasm.mri.masks import create_mask as create_mask
from chasm.mri.masks import mask_from_array as mask_from_array
from chasm.mri.operators import Operator as Operator
from chasm.mri.operators import add_noise as add_noise
from chasm.mri.operators import zero_filled as zero_filled
from chasm.mri.phase import smooth_phase as smooth_phase
from chasm.mri.plane_masks import PlaneMask as PlaneMask
from chasm.mri.plane_masks import create_plane_mask as create_plane_mask
