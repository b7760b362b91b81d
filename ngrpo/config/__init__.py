# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to do: one typed object, made once, of a command line, of a YAML file, or of both."""
