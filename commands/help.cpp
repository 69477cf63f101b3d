#include "commands/help.h"

#include <algorithm>

#include "models/family.h"
#include "runtime/error.h"
#include "runtime/names.h"
#include "runtime/text.h"

namespace {

constexpr char UNGROUPED[] = "Options";  // CLI11's name

std::string word_of(const std::string& heading) {
    return heading.substr(0, heading.find(':'));
}

// Shows some of the groups, and some of their options.
class HelpFormatter : public CLI::Formatter {
  public:
    std::function<bool(const CLI::Option*)> shows;
    std::string last_lines;

    std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode) const override {
        std::string text = make_description(app) + make_usage(app, name) + make_positionals(app);
        for (const std::string& group : app->get_groups()) {
            const auto options = app->get_options([&](const CLI::Option* option) {
                return option->get_group() == group && option->nonpositional() && shows(option);
            });
            if (!options.empty()) text += make_group(group, false, options);
        }
        return text + last_lines;
    }

    // Without the colon that CLI11 writes after a heading.
    std::string make_group(std::string group, bool is_positional,
                           std::vector<const CLI::Option*> options) const override {
        const std::string text = CLI::Formatter::make_group(group, is_positional, options);
        const size_t end = text.find(group) + group.size();
        return group == UNGROUPED ? text : text.substr(0, end) + text.substr(end + 1);
    }

    // Leaves out lists of many options that one excludes: each of those names the option from its own side; and
    // REQUIRED where the description says when it is.
    std::string make_option_opts(const CLI::Option* option) const override {
        std::string text = CLI::Formatter::make_option_opts(option);
        if (starts_with(option->get_description(), "required ")) text = text.substr(0, text.find(" REQUIRED"));
        return option->get_excludes().size() > 2 ? text.substr(0, text.find(" Excludes:")) : text;
    }
};

}  // namespace

std::optional<std::string> help_topic(const std::vector<std::string>& args) {
    for (size_t i = 0; i < args.size(); i++) {
        if (starts_with(args[i], "--help=")) return args[i].substr(7);
        if (args[i] != "--help" && args[i] != "-h") continue;
        return i + 1 < args.size() && !starts_with(args[i + 1], "-") ? args[i + 1] : "";
    }
    return {};
}

std::string help_text(const CLI::App& app, const std::string& topic, const std::vector<std::string>& short_list) {
    std::vector<std::string> words;
    for (const std::string& group : app.get_groups())
        if (group != UNGROUPED && !group.empty()) words.push_back(word_of(group));
    if (!topic.empty() && topic != "all" && std::find(words.begin(), words.end(), topic) == words.end())
        throw UsageError(str("--help ", topic, ": there is no such group of options; there are ",
                             words.empty() ? "" : joined(words) + " and ", "all"));
    HelpFormatter formatter;
    formatter.shows = [&](const CLI::Option* option) {
        if (topic == "all") return true;
        if (!topic.empty()) return word_of(option->get_group()) == topic;
        if (short_list.empty()) return option->get_group() != help_group::SHAPE;
        return std::find(short_list.begin(), short_list.end(), option->get_name()) != short_list.end();
    };
    if (topic.empty() && !words.empty()) {
        const std::string command = app.get_name() + " --help ";
        formatter.last_lines = str("\nMore: '", command, words.front(), "' lists a group, '", command,
                                   "all' every option. Groups: ", joined(words), "\n");
    }
    if (topic == word_of(help_group::SHAPE))
        formatter.last_lines = str("\nPresets, whose shape these options change: ", joined(preset_names()), "\n");
    return formatter.make_help(&app, app.get_name(), CLI::AppFormatMode::Normal);
}
