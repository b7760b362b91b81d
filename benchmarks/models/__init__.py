# SPDX-License-Identifier: Apache-2.0
"""Is the replay exact on this model type? Tiny random models of any type, in stock vLLM and in transformers."""
