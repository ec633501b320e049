"""What npufleet's processes agree on: both custom resources, conditions, reports, settings and the pod contract."""

GROUP = "npufleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

POOL_KIND = "InferencePool"
POOL_PLURAL = "npupools"
MODEL_KIND = "AscendModel"
MODEL_PLURAL = "ascendmodels"
