"""The one thing that pyproject.toml cannot say: recipes, a folder of the repository, are installed inside vla_rl."""

from setuptools import find_namespace_packages, setup

OURS = ["vla_rl*", "world_model*", "sim*", "real_robot*"]

setup(packages=[*find_namespace_packages(include=OURS), "vla_rl.configs"], package_dir={"vla_rl.configs": "configs"})
