"""How colcon installs the package."""

from glob import glob

from setuptools import setup

NAME = "vla_rl_bridge"

setup(
    name=NAME,
    version="0.1.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", glob("launch/*.launch.py")),
        (f"share/{NAME}/config", glob("config/*.yaml")),
    ],
    install_requires=["setuptools", "vla-rl"],
    zip_safe=True,
    maintainer="The vla-rl authors",
    maintainer_email="vla-rl@example.org",
    description="A vision-language-action policy on this robot, through the safety supervisor.",
    license="MIT",
    entry_points={"console_scripts": [f"bridge = {NAME}.node:main"]},
)
