# SPDX-License-Identifier: Apache-2.0
probe in out --threads 1
