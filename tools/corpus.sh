#!/bin/bash
# Makes a corpus of English text from Debian packages: 4 MB of novels, or 62 MB of six kinds.
#
# usage: tools/corpus.sh DIR [--novels]
#
# Writes DIR/novels.txt and, without --novels, bible.txt, sermons.txt, essays.txt, kernel_docs.txt and
# glosses.txt. A file that is there already is kept, so that an interrupted run can be repeated. The packages
# are downloaded (by apt, which checks their hashes) and unpacked in a temporary folder, not installed; the
# bible and the sermons need the reader of their format, libsword-utils.
set -euo pipefail
export LC_ALL=C

die() {
  echo "corpus: $*" >&2
  exit 1
}

usage="usage: tools/corpus.sh DIR [--novels]"
(($# == 1)) || [[ $# == 2 && $2 == --novels ]] || die "$usage"
[[ $1 != -* ]] || die "$usage"
tools=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" || die "cannot make the folder $1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# unpack PACKAGE: its files, under $work/PACKAGE.
unpack() {
  mkdir -p "$work/$1/deb"
  if [[ -z $(apt-cache show "$1" 2>/dev/null) && $EUID == 0 ]]; then apt-get -qq update; fi
  (cd "$work/$1/deb" && apt-get -qq -o APT::Sandbox::User=root -o Acquire::Retries=3 download "$1") ||
    die "apt cannot download $1: is the network there, and does \`apt-get update\` succeed?"
  dpkg-deb -x "$work/$1"/deb/*.deb "$work/$1" || die "the package $1 is damaged"
}

# make FILE LEAST_BYTES PACKAGE COMMAND...: DIR/FILE is what COMMAND, run in the unpacked package, prints.
make() {
  local file=$out/$1 least=$2 package=$3 bytes
  shift 3
  if [[ -e $file ]]; then return; fi
  unpack "$package"
  (cd "$work/$package/usr" && "$@") >"$file.part" || die "cannot read the text of $package"
  bytes=$(stat -c %s "$file.part")
  ((bytes >= least)) || die "$package gave $bytes bytes of text where at least $least were expected"
  mv "$file.part" "$file"
  rm -rf "${work:?}/$package"
}

# Jane Austen's novels, character vectors in an R data base: for each, its length and a zlib stream of R's
# serialised form (R Internals, section 1.8): a header of 27 bytes, the number of lines, then for each line a
# flag word, its length, its bytes.
novels() {
  python3 - lib/R/site-library/janeaustenr/data/Rdata.rdb <<'PY'
import sys, zlib

def number(at):
    return int.from_bytes(vector[at:at + 4], "big")

base = open(sys.argv[1], "rb").read()
while base:
    stream = zlib.decompressobj()
    vector = stream.decompress(base[4:])
    base = stream.unused_data
    at = 31
    for _ in range(number(27)):
        end = at + 8 + number(at + 4)
        sys.stdout.buffer.write(vector[at + 8:end] + b"\n")
        at = end
PY
}

# sword MODULE: the plain text of a module of the Sword library, without verse numbers and layout.
sword() {
  SWORD_PATH=$PWD/share/sword mod2imp "$1" -s 2>/dev/null |
    sed '/^\$\$\$/d; s/ *\* */ /g; s/^ *//; s/  */ /g; /^$/d'
}

essays() {
  find share/doc/anarchism/markdown \( -name 'sec*.md*' -o -name 'append*.md*' \) -print0 | sort -z |
    xargs -0 zcat -f
}

kernel_docs() {
  find share/doc/linux-doc-6.1/Documentation -name '*.rst.gz' -not -path '*/translations/*' -print0 | sort -z |
    xargs -0 zcat
}

# WordNet's explanations of words: what stands behind the bar, after a licence in indented lines.
glosses() { sed -n '/^  /d; s/^.*| \(.*[^ ]\) *$/\1./p' share/wordnet/data.*; }

make novels.txt 4000000 r-cran-janeaustenr novels
if [[ ${2:-} != --novels ]]; then
  bash "$tools/setup.sh" libsword-utils
  make bible.txt 4900000 sword-text-web sword engWEB2015eb
  make sermons.txt 11500000 sword-comm-tdavid sword TDavid
  make essays.txt 11000000 anarchism essays
  make kernel_docs.txt 20000000 linux-doc-6.1 kernel_docs
  make glosses.txt 9000000 wordnet-base glosses
fi
wc -c "$out"/*.txt
