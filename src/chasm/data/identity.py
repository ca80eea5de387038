"""Read the patient, the study and the scanner of a file as DICOM attributes, so that a PACS can file its images."""

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
# place of the same fact in an ISMRMRD header
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
    """Return the patient, the study and the scanner that a file names, by DICOM keyword; empty ones are left out.

    The file is a DICOM image, or k-space with an ISMRMRD header (.mrd, .h5). Other files give nothing.
    """
    if format_of(file) == ".dcm":
        import pydicom

        with reading(file, "header"):
            data = pydicom.dcmread(file, stop_before_pixels=True)
            attributes = {name: data.get(name) for name in _DICOM}
    else:
        xml = header_of_file(file)
        with reading(file, "ismrmrd_header"):
            attributes = {} if xml is None else _from_xml(ET.fromstring(xml))
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _from_xml(header: ET.Element) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for place, name in _ISMRMRD.items():
        text = header.findtext("/".join(f"{{*}}{step}" for step in place.split("/")))
        if text and text.strip():
            attributes[name] = text.strip()
    for name in ("PatientBirthDate", "StudyDate"):
        if name in attributes:
            attributes[name] = attributes[name].replace("-", "")[:8]
    if "StudyTime" in attributes:
        attributes["StudyTime"] = attributes["StudyTime"].replace(":", "").split(".")[0][:6]
    if attributes.get("PatientSex") not in (None, "M", "F", "O"):
        del attributes["PatientSex"]
    return attributes
