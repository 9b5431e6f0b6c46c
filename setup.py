"""The packages. Everything else is in pyproject.toml, which can find packages or rename a folder, but not both."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kvcanary_plugin", "kvcanary_plugin.*"]), "kvcanary_plugin.patches"],
    package_dir={"kvcanary_plugin.patches": "patches"},
)
