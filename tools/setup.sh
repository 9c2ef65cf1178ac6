#!/bin/bash
# Installs, with apt, what building and testing strata needs and is not there yet.
#
# usage: tools/setup.sh              what the build and the tests need
#        tools/setup.sh PACKAGE...   these Debian packages instead
#
# Without root or apt it names what is missing and stops with status 1.
set -euo pipefail

packages=(
  bazel-bootstrap g++ python3
  catch2 libeigen3-dev libfmt-dev libopenmpi-dev libpcre2-dev libsentencepiece-dev libspdlog-dev liburing-dev
  libutf8proc-dev libxxhash-dev libyaml-cpp-dev nlohmann-json3-dev openmpi-bin zlib1g-dev
)
if (($# > 0)); then packages=("$@"); fi

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

missing=()
for package in "${packages[@]}"; do
  installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then exit 0; fi

echo "missing packages: ${missing[*]}" >&2
if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "install them (on Debian 12 or Ubuntu, as root: apt-get install ${missing[*]}), then run this again" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq -o Acquire::Retries=3 install -y --no-install-recommends "${missing[@]}" </dev/null >/dev/null
