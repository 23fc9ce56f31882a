// Scripts that connect a shell's completion with `tessera complete`, which finds the candidates.
#pragma once

#include <string_view>

namespace tessera {

inline constexpr std::string_view kCompletionHelp =
    R"sh(bash   eval "$(tessera completion bash)" in ~/.bashrc
zsh    eval "$(tessera completion zsh)" in ~/.zshrc, after compinit
fish   tessera completion fish > ~/.config/fish/completions/tessera.fish

Names of buffers, strategies and devices come from the server.)sh";

// readline splits words at '=' and ':' and replaces what follows them. `tessera` receives whole
// words, so the part before the last piece is removed from its candidates.
inline constexpr std::string_view kBashCompletion = R"sh(# Completes tessera in bash.
_tessera() {
  local line=${COMP_LINE:0:COMP_POINT} words answers answer word piece kept
  read -r -a words <<<"$line"
  if [[ $line == *[[:space:]] ]]; then words+=(''); fi
  word=${words[-1]}
  piece=${word##*[=:]}
  kept=${word:0:${#word}-${#piece}}
  COMPREPLY=()
  mapfile -t answers < <("${1/#\~/$HOME}" complete -- "${words[@]:1}" 2>/dev/null)
  if [[ ${answers[0]-} == files ]]; then
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen -f -- "$piece")
    return
  fi
  for answer in "${answers[@]:1}"; do
    answer=${answer%%$'\t'*}
    COMPREPLY+=("${answer#"$kept"}")
  done
}
complete -F _tessera tessera
)sh";

inline constexpr std::string_view kZshCompletion = R"sh(#compdef tessera
# Completes tessera in zsh.
_tessera() {
  local -a answers described
  local answer
  answers=("${(@f)$("${(Q)words[1]/#\~/$HOME}" complete -- "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ $answers[1] == files ]]; then
    _files
    return
  fi
  for answer in "${(@)answers[2,-1]}"; do
    described+=("${${answer%%$'\t'*}//:/\\:}:${answer#*$'\t'}")
  done
  _describe -V tessera described
}
if [[ $funcstack[1] == _tessera ]]; then
  _tessera "$@"
else
  compdef _tessera tessera
fi
)sh";

inline constexpr std::string_view kFishCompletion = R"sh(# Completes tessera in fish.
function __tessera_complete
    set -l words (commandline -opc)
    set -l answers ($words[1] complete -- $words[2..] (commandline -ct) 2>/dev/null)
    if test "$answers[1]" = files
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $answers[2..]
    end
end
complete -c tessera -f -a '(__tessera_complete)'
)sh";

// Returns the script for a shell: bash, zsh or fish.
inline std::string_view CompletionScript(std::string_view shell) {
  if (shell == "bash") return kBashCompletion;
  return shell == "zsh" ? kZshCompletion : kFishCompletion;
}

}  // namespace tessera
