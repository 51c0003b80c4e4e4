// SPDX-License-Identifier: Apache-2.0
// A command as in the wheel: one line that calls into the library of commands.
// NOLINTNEXTLINE(readability-identifier-naming): the name that the wheel links.
int main_linked(int argc, char** argv);
int main(int argc, char** argv) { return main_linked(argc, argv); }
