# SPDX-License-Identifier: Apache-2.0
probe in --list out
probe in --list --force
probe in --explain w --resume
probe in --list --explain w
probe --list
