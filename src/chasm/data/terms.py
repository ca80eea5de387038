"""The terms of the data: its origin, and whether a network trained on it may be given away."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RESEARCH = "research and education, without commerce"


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one source of data."""

    source: str  # name and makers of the data
    licence: str  # its name, or what the owners say
    weights: bool  # whether weights trained on it may be given away


_NONE = "none stated: for research evaluation only"
_REFINEGAN = "RefineGAN: for research only"
_PROXY = {
    "brain_ixi_pd": Terms(
        "IXI brains, PD (brain-development.org), by way of RefineGAN", f"CC BY-SA 3.0; {_REFINEGAN}", True
    ),
    "tumour_lgg_flair": Terms(
        "TCGA-LGG FLAIR (TCIA; Buda et al. 2019, Mazurowski et al. 2017), by way of Kaggle",
        "CC BY 3.0 at TCIA, CC BY-NC-SA 4.0 at Kaggle",
        True,
    ),
    "knee_stanford_pdfs": Terms(
        "Stanford 3-D FSE knees (mridata.org), by way of RefineGAN", f"CC BY-NC 4.0; {_REFINEGAN}", True
    ),
    "natural_imagenet": Terms("280 photographs of ImageNet", RESEARCH, True),
    "natural_scenes_bsds_ade": Terms("BSDS500 and 9 photographs of ADE20K (these for scores only)", RESEARCH, True),
    "natural_kodak_test": Terms("Kodak true-colour photographs", "unrestricted", True),
    "brain_siat_t2": Terms("SIAT brains, T2 (Liu et al., MRM 83(1):322-336, 2020)", _NONE, False),
    "raw_complex": Terms("SIAT brains, T2, complex (Liu et al., MRM 83(1):322-336, 2020)", _NONE, False),
    "raw_8ch": Terms("one 8-channel brain slice of the ESPIRiT toolbox", _NONE, False),
}


def terms_of(dataset: str, options: Mapping[str, Any]) -> list[Terms] | None:
    """Return the terms of the data that a dataset with these options reads; None if they are not known.

    >>> [terms.licence for terms in terms_of("proxy", {"part": ["natural_kodak_test", "natural_imagenet"]})]
    ['unrestricted', 'research and education, without commerce']
    """
    if dataset == "embedded" and options.get("content") == "photos":
        return [Terms("photographs of scikit-image", "CC0 or public domain; none stated for the motorcycle", False)]
    if dataset == "embedded":
        return [Terms("drawn by chasm", "MIT", True)]
    if dataset != "proxy":
        return None
    parts = [options.get("part", "brain_siat_t2"), options.get("also", [])]
    names = [name for part in parts for name in ([part] if isinstance(part, str) else part)]
    return [_PROXY[name] for name in names if name in _PROXY]
