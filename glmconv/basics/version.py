"""The version of glmconv, for manifests, reports and ``--version``."""

__version__ = "0.1.0"
