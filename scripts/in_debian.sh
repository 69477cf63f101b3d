#!/usr/bin/env bash
# Runs a command on another Debian release, as a newcomer would: a fresh tree of that release, the install line of
# README.md, a fresh clone of the last commit here, then the command in the clone.
#
#   scripts/in_debian.sh SUITE COMMAND             as root:  scripts/in_debian.sh trixie 'make train'
#   scripts/in_debian.sh --user SUITE COMMAND      as an ordinary user who may use sudo
#   scripts/in_debian.sh --no-sudo SUITE COMMAND   as an ordinary user who may not; root has run the install line
#   scripts/in_debian.sh --tree DIR SUITE COMMAND  keeps the tree in DIR; where there is one, only the clone is fresh
#
# SUITE is bookworm (Debian 12), trixie (Debian 13) or another that debootstrap knows. Needed are root, debootstrap, 4 GB in
# TMPDIR (/tmp) and a minute before the command starts. Without --tree nothing is left behind. The exit status is the
# command's.
#
# The environment is that of a new machine. It gets from here only what it needs to reach the network (proxies, the
# package index and the certificates of pip; MIRROR is debootstrap's) and WERROR and CI.
set -euo pipefail

fail() {
    echo "in_debian.sh: $1" >&2
    exit 2
}

tree='' user=root sudo=''
while [[ ${1:-} == -* ]]; do
    case $1 in
        --user) user=newcomer sudo=yes ;;
        --no-sudo) user=newcomer sudo=no ;;
        --tree) tree=${2:-} && shift ;;
        *) fail "unknown option $1; there are --user and --tree DIR" ;;
    esac
    shift
done
[[ $# == 2 && -n $1 && -n $2 ]] || fail "usage: scripts/in_debian.sh [--user|--no-sudo] [--tree DIR] SUITE COMMAND"
suite=$1 command=$2
[[ $(id -u) == 0 ]] || fail "a chroot needs root: run it with sudo."
command -v debootstrap >/dev/null || fail "there is no debootstrap: apt-get install -y debootstrap"

cd "$(dirname "$0")/.."
if [[ -n $(git status --porcelain) ]]; then echo "in_debian.sh: the clone is without the uncommitted changes here." >&2; fi
if [[ -z $tree ]]; then
    tree=$(mktemp -d "${TMPDIR:-/tmp}/in_debian.XXXXXX")
    trap 'rm -rf --one-file-system "$tree"' EXIT
fi
mkdir -p "$tree"
chmod 755 "$tree"  # other users of the tree go through it
tree=$(realpath "$tree")

if [[ ! -e $tree/etc/debian_version ]]; then
    echo "+ debootstrap --variant=minbase $suite"
    debootstrap --variant=minbase "$suite" "$tree" ${MIRROR:+"$MIRROR"} >"$tree/debootstrap.log" 2>&1 ||
        { tail -n 5 "$tree/debootstrap.log" >&2; fail "debootstrap failed: see above."; }
fi

# dpkg need not wait for the disk: a tree that is lost is made again.
echo force-unsafe-io >"$tree/etc/dpkg/dpkg.cfg.d/unsafe-io"
home=/root
[[ $user == root ]] || home=/home/$user
rm -rf "$tree$home/train_gpt"
mkdir -p "$tree$home"
git clone --quiet --no-hardlinks . "$tree$home/train_gpt"
cp -L /etc/resolv.conf /etc/hosts "$tree/etc/"

variables=(HOME="$home" USER="$user" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8)
for name in TERM CI WERROR http_proxy https_proxy no_proxy PIP_INDEX_URL; do
    [[ -z ${!name:-} ]] || variables+=("$name=${!name}")
done
if [[ -n ${PIP_CERT:-} ]]; then  # under another name: the package ca-certificates writes the usual one
    install -m 644 "$PIP_CERT" "$tree/etc/pip-certificates.crt"
    variables+=(PIP_CERT=/etc/pip-certificates.crt)
fi

# The commands inside: as root those that set up the machine, then as the user those of README.md.
cat >"$tree/prepare.sh" <<'PREPARE'
set -euo pipefail
user=$1 sudo=$2 install_line=$3
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
if [[ $user != root ]]; then
    id "$user" >/dev/null 2>&1 || useradd --shell /bin/bash "$user"
    chown -R "$user:" "/home/$user"
fi
if [[ $sudo == yes ]]; then
    apt-get -qq install -y sudo >/dev/null
    echo "$user ALL=(ALL) NOPASSWD: ALL" >/etc/sudoers.d/newcomer
else
    rm -f /etc/sudoers.d/newcomer  # of an earlier run in this tree
    $install_line >/dev/null
fi
PREPARE
install_line=$(sed -n 's/^sudo \(apt-get install .*\)/\1/p' README.md | head -n 1)
[[ $install_line == apt-get\ install* ]] || fail "README.md has no line 'sudo apt-get install ...'"

# Mounts and processes end with the name spaces, however the command ends.
as_user=true
[[ $sudo != yes ]] || as_user="sudo $install_line >/dev/null"
echo "+ in a tree of $suite, as $user${sudo:+, sudo: $sudo}: $install_line && cd train_gpt && $command"
export tree user sudo install_line as_user command
unshare --mount --pid --fork --kill-child bash -euc '
    mount -t proc proc "$tree/proc"
    mount --rbind /sys "$tree/sys"
    mount --rbind /dev "$tree/dev"
    chroot "$tree" env -i "$@" bash /prepare.sh "$user" "$sudo" "$install_line"
    chroot --userspec="$user:" "$tree" env -i "$@" bash -ec "cd; $as_user; cd train_gpt; $command"
' in_debian.sh "${variables[@]}"
