"""`python -m xpress_export`, the same as `xpress-export`."""

from xpress_export.cli import main

if __name__ == "__main__":
    main()
