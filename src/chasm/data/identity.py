"""What a file says about the patient, the study and the scanner, in the words of DICOM, so that a PACS can file it."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from chasm.data.files import reading
from chasm.data.formats import format_of
from chasm.data.ismrmrd import header_of_file

# Attributes that an image takes over from the one it is made from, by module.
_PATIENT = "PatientName PatientID IssuerOfPatientID PatientBirthDate PatientSex PatientAge PatientSize PatientWeight"
_STUDY = (
    "StudyInstanceUID StudyID StudyDate StudyTime StudyDescription AccessionNumber ReferringPhysicianName "
    "FrameOfReferenceUID PositionReferenceIndicator"
)
_EQUIPMENT = (
    "Manufacturer ManufacturerModelName InstitutionName StationName DeviceSerialNumber MagneticFieldStrength "
    "ImagingFrequency ImagedNucleus ReceiveCoilName TransmitCoilName"
)
_ACQUISITION = (
    "BodyPartExamined Laterality PatientPosition ProtocolName SeriesNumber SeriesDescription AcquisitionDate "
    "AcquisitionTime AcquisitionNumber ScanningSequence SequenceVariant ScanOptions SequenceName MRAcquisitionType "
    "RepetitionTime EchoTime InversionTime FlipAngle EchoTrainLength EchoNumbers NumberOfAverages PixelBandwidth"
)
_DICOM = (*_PATIENT.split(), *_STUDY.split(), *_EQUIPMENT.split(), *_ACQUISITION.split())
# where an ISMRMRD header says the same
_ISMRMRD = {
    "subjectInformation/patientName": "PatientName",
    "subjectInformation/patientID": "PatientID",
    "subjectInformation/patientBirthdate": "PatientBirthDate",
    "subjectInformation/patientGender": "PatientSex",
    "subjectInformation/patientHeight_m": "PatientSize",
    "subjectInformation/patientWeight_kg": "PatientWeight",
    "studyInformation/studyInstanceUID": "StudyInstanceUID",
    "studyInformation/studyID": "StudyID",
    "studyInformation/studyDate": "StudyDate",
    "studyInformation/studyTime": "StudyTime",
    "studyInformation/studyDescription": "StudyDescription",
    "studyInformation/accessionNumber": "AccessionNumber",
    "studyInformation/referringPhysicianName": "ReferringPhysicianName",
    "studyInformation/bodyPartExamined": "BodyPartExamined",
    "measurementInformation/frameOfReferenceUID": "FrameOfReferenceUID",
    "measurementInformation/patientPosition": "PatientPosition",
    "measurementInformation/protocolName": "ProtocolName",
    "measurementInformation/seriesDescription": "SeriesDescription",
    "acquisitionSystemInformation/systemVendor": "Manufacturer",
    "acquisitionSystemInformation/systemModel": "ManufacturerModelName",
    "acquisitionSystemInformation/systemFieldStrength_T": "MagneticFieldStrength",
    "acquisitionSystemInformation/institutionName": "InstitutionName",
    "acquisitionSystemInformation/stationName": "StationName",
    "sequenceParameters/TR": "RepetitionTime",
    "sequenceParameters/TE": "EchoTime",
    "sequenceParameters/TI": "InversionTime",
    "sequenceParameters/flipAngle_deg": "FlipAngle",
}


def dicom_attributes(file: Path) -> dict[str, Any]:
    """Return what a file says about the patient, the study and the scanner.

    Args:
        file: a DICOM image, or k-space with an ISMRMRD header (.mrd, .h5). Others say nothing.

    Returns:
        Values by the keyword of their DICOM attribute; empty ones are left out.
    """
    if format_of(file) == ".dcm":
        import pydicom

        with reading(file, "header"):
            data = pydicom.dcmread(file, stop_before_pixels=True)
            found = {name: data.get(name) for name in _DICOM}
    else:
        xml = header_of_file(file)
        with reading(file, "ismrmrd_header"):
            found = {} if xml is None else _from_xml(ET.fromstring(xml))
    return {name: value for name, value in found.items() if value not in (None, "")}


def _from_xml(header: ET.Element) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, name in _ISMRMRD.items():
        text = header.findtext("/".join(f"{{*}}{step}" for step in place.split("/")))
        if text and text.strip():
            found[name] = text.strip()
    for name in ("PatientBirthDate", "StudyDate"):
        if name in found:
            found[name] = found[name].replace("-", "")[:8]
    if "StudyTime" in found:
        found["StudyTime"] = found["StudyTime"].replace(":", "").split(".")[0][:6]
    if found.get("PatientSex") not in (None, "M", "F", "O"):
        del found["PatientSex"]
    return found
