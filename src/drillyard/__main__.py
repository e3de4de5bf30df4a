"""`python -m drillyard` is `drillyard`: for launchers that start a rank by its interpreter."""

from drillyard.cli.main import main

main()
