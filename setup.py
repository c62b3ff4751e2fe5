"""What pyproject.toml cannot say: an editable install also exposes `models`."""

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWithModels(editable_wheel):
    """Maps `models` next to `parallel3d`; tests, tools, conf and recipes stay out of reach."""

    def run(self) -> None:
        """Build the editable wheel over the longer list of packages."""
        self.distribution.packages += find_packages(include=["models", "models.*"])
        super().run()


setup(cmdclass={"editable_wheel": EditableWithModels})
