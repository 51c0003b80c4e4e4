# SPDX-License-Identifier: Apache-2.0
probe in out --warn same --warn same --warn other
