"""The core is usable in an environment that has neither Prefect nor the readers' libraries."""

import subprocess
import sys

ABSENT = ("prefect", "prefect_aws", "datasets", "zarr", "s3fs", "fsspec", "typer")
MODULES = (
    "blocks",
    "checkpoint",
    "config",
    "data",
    "decode",
    "engines",
    "evaluation",
    "export",
    "extraction",
    "float8",
    "flops",
    "hidden_states",
    "import_drafter",
    "loss",
    "manifest",
    "model",
    "object_cache",
    "packing",
    "record_index",
    "served_evaluation",
    "shards",
    "storage",
    "store",
    "target",
    "teacher",
    "tokenization",
    "train",
)


def test_the_core_imports_without_orchestration_and_readers():
    code = (
        f"import importlib, sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"for name in {MODULES}: importlib.import_module('dflash_core.' + name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_configuration_manifest_and_storage_do_not_load_torch():
    code = (
        "import sys, dflash_core.config, dflash_core.manifest, dflash_core.storage\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
